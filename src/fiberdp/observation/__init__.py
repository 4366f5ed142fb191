"""Where each example's gradient is taken: a list of probes, which is all an engine ever sees of a method."""

from fiberdp.observation.one_point import OnePoint
from fiberdp.observation.two_point import TwoPoint

OBSERVATIONS = {cls.name: cls for cls in (OnePoint, TwoPoint)}

__all__ = ["OBSERVATIONS", "OnePoint", "TwoPoint"]
