"""Pictures of recordings: trees, pools, charts, the notebook stepper and the live page.

Imports minirad, never the other way round. Everything here reads frames, so that a recording, a live
engine and a student's own tree are drawn by the same code.
"""
