"""One node's weights: what its layers hold, how a step's gradients add up, and which version a micro-batch sees."""

from edgesplit.weights.policies import Latest, Stash, WeightPolicy
from edgesplit.weights.store import Exported, LayerStore, Snapshot
from edgesplit.weights.sums import Report, StepSums

__all__ = ["Exported", "Latest", "LayerStore", "Report", "Snapshot", "Stash", "StepSums", "WeightPolicy"]
