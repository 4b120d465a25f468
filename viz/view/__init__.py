"""What a recording shows at a position, as plain data: for the page, the notebook and the charts alike.

    requests.py   what each request did, frame by frame      pool.py    the owner of each page, in both tiers
    usage.py      free, evictable, protected, private tokens    victims.py evictions, and what else could go
    quiz.py       what could be asked before a position is shown          text.py    texts in short

Made from a recording or a `viz.trace.View`. No HTML, no Plotly, no DOT: viz/draw draws it, viz/web and
viz/notebook show it.
"""
