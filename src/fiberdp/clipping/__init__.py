"""How one example's observation is bounded: norms in, factors out, and the sensitivity that follows."""

from fiberdp.clipping.automatic import Automatic
from fiberdp.clipping.flat import Flat
from fiberdp.clipping.per_layer import PerLayer

CLIPS = {cls.name: cls for cls in (Flat, Automatic, PerLayer)}

__all__ = ["CLIPS", "Automatic", "Flat", "PerLayer"]
