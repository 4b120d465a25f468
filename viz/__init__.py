"""Pictures of recordings: trees, pools, charts, the notebook stepper and the live page.

    trace.py    any position of a recording, by event, step or scene      fork.py    the same requests, anew
    view/       what a position shows, as plain data                      draw/      trees, charts, stills
    web/        the page and its server                                   notebook/  the widget
    live.py, gallery.py, figure3.py, roofline.py, evidence.py   commands: `python -m viz.live`, ...
    kv.py, tree.py, page.py, stepper.py                         public names of what lies in the rooms

Imports minirad, never the other way round. Everything here reads frames, so that a recording, a live
engine and a student's own tree are drawn by the same code.
"""
