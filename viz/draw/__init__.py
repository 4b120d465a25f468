"""Pictures of what viz/view says: trees by Graphviz, charts by Plotly, and stills without a browser."""
