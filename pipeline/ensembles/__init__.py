"""Several models trained at once by one step, and tables of what came of their settings."""

from pipeline.ensembles.building import ensemble
from pipeline.ensembles.monitoring import per_member
from pipeline.ensembles.sweeping import Row, Sweep, sweep
from pipeline.ensembles.together import Ensemble

__all__ = ["Ensemble", "Row", "Sweep", "ensemble", "per_member", "sweep"]
