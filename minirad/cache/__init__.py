"""What is remembered: the radix tree, its eviction policies and the page allocator (numpy only)."""
