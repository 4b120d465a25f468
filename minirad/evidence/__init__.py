"""What the claims rest on: the paper's workloads as programs, each part switched off in turn, the limits.

Does not import torch: `python -m minirad bench programs` runs it on a model.
"""
