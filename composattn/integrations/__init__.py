"""Where models meet composattn under other libraries' names. Each module imports its library when it is imported."""
