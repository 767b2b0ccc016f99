"""Complete small programs, each in one file that stands alone."""
