"""What a run costs: events say what was done to the data, accountants price them, the ledger keeps them.

    events       DpEvent <-> JSON, composition, the mechanisms inside
    accountant   epsilon(event, delta) by dp_accounting: pld (tight), rdp, rdp-classic; the neighbouring relations
    calibrate    the noise multiplier that meets a target epsilon
    ledger       one line a step, on disk before the release

Nothing here needs torch.
"""

from fiberdp.accounting.accountant import ACCOUNTANTS, RELATIONS, epsilon
from fiberdp.accounting.calibrate import noise_multiplier
from fiberdp.accounting.events import compose, from_json, to_json
from fiberdp.accounting.ledger import Ledger, LedgerFile, read_ledger

__all__ = [
    "ACCOUNTANTS",
    "RELATIONS",
    "Ledger",
    "LedgerFile",
    "compose",
    "epsilon",
    "from_json",
    "noise_multiplier",
    "read_ledger",
    "to_json",
]
