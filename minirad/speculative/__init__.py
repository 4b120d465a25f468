"""Speculative decoding: several tokens a forward pass, the very tokens that one at a time would give.

A drafter guesses the next tokens, the model computes them all in one pass, and those that it would have
chosen itself are kept. The folder may be deleted; nothing else needs it.

choose.py   which drafter a configuration wants
ngram.py    drafts looked up in what the request says already
jump.py     what a grammar forces: tokens that need no drafter, and cannot be rejected
eagle.py    drafts from a head, whose KV lies in the same slots
head.py     the head itself: its weights and its arithmetic
runner.py   verifies drafts: one forward pass, then the tokens that hold
engine.py   gives drafts their slots, and takes those of the rejected back in the same step
stats.py    running totals
"""
