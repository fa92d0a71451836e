"""What the operating system is asked: the C library, which host this is, memory and pages."""
