"""What a run can prove or report about itself."""

from fiberdp.diagnostics.receipt import Check, Receipt, ReceiptError, noise_receipt

__all__ = ["Check", "Receipt", "ReceiptError", "noise_receipt"]
