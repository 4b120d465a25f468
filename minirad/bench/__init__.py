"""Measurements that anybody can repeat: `python -m minirad bench ...`. Imports no torch by itself."""
