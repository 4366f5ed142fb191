"""What the noise adds to Adam's second moment, and its removal."""

from fiberdp.moments.calibration import CALIBRATIONS, Exact, NoCorrection, Raw, Steady

__all__ = ["CALIBRATIONS", "Exact", "NoCorrection", "Raw", "Steady"]
