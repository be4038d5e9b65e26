"""composattn under the names and with the arguments of other libraries; each module imports the one it needs."""
