"""The Trainer of transformers, private: `PrivateTrainer(..., privacy=PrivacyArguments(...))`.  See docs/from-transformers.md."""

from fiberdp.integrations.transformers.arguments import PrivacyArguments
from fiberdp.integrations.transformers.trainer import PrivateTrainer

__all__ = ["PrivacyArguments", "PrivateTrainer"]
