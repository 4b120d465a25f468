"""The notebook widget, under the name that notebooks use: `from viz.stepper import Stepper`.

viz/notebook/stepper.py is the widget, viz/fork.py the fork.
"""

from viz.fork import fork
from viz.notebook.stepper import Output, Stepper

__all__ = ["Output", "Stepper", "fork"]
