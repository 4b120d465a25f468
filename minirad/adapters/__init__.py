"""Adapters: low-rank corrections of a model's matrices (LoRA), several of them in one batch.

    y = W x + scale * B (A x)      each token with its own request's A and B, or with none

where.py finds the directories in which Hugging Face's PEFT keeps them, peft_format.py reads these, model.py
computes, runner.py tells the model whose token is whose, choose.py joins these for an engine. What one
adapter computed must not be used for another one's request, though the tokens be the same: the name is part
of the tree's namespace (intake.py), and nothing else in the engine knows of adapters.
"""
