"""What a mod means: expressions, tracing, algebra and analysis; knows no GPU and no kernel."""
