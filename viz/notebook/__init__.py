"""The widget for notebooks: viz/view's data and viz/draw's tree in a cell, with controls."""
