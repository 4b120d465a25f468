"""Speculative decoding: several tokens a forward pass, the very tokens that one at a time would give.

A drafter guesses the next tokens, the model computes them all in one pass, and those that it would have
chosen itself are kept. The folder may be deleted; nothing else needs it.
"""
