"""The page in a browser: its data, its server, what it can ask for, and the same page as a file."""
