"""Several workers behind a router: which of them a request goes to, and how good that choice was."""
