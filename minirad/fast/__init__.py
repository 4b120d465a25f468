"""What makes it fast: each file replaces a launch, or a part of the model."""
