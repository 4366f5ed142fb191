"""How near generated sentences are to references, by the packages that are known for it.

    bleu                 sacrebleu, corpus BLEU of all references, 13a tokens, without case; in percent
    rouge_l              rouge-score, F of the longest common subsequence, best reference, mean over outputs; in percent
    meteor_no_synonyms   nltk, METEOR of 2007 from equal words and equal stems, best reference, mean over outputs
    nist                 nltk, corpus NIST of up to 5 words
    cider                pycocoevalcap, CIDEr-D

METEOR matches synonyms too, by WordNet, which no package here brings; without them it is lower than the METEOR of the literature, whose
parameters are also later ones.  So it has another name, and is not to be held beside published figures.  Words are sacrebleu's 13a
tokens in lower case throughout but for ROUGE, which has its own; other tokenizers (Stanford's, for CIDEr) give slightly other figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean

from fiberdp.recipes.tables import extra

NGRAMS = 5  # of NIST


class _NoSynonyms:
    """In the place of WordNet: no word has any."""

    def synsets(self, word: str) -> tuple[()]:
        return ()


def scores(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """outputs[i] against each of references[i].  Empty outputs count as what they are.

    ValueError without outputs, or for one without references.  ImportError without the recipes extra.
    """
    if not outputs or len(outputs) != len(references) or not all(references):
        raise ValueError(
            f"{len(outputs)} outputs with {len(references)} sets of references: each output must have at least one reference, because "
            "it is compared with the nearest. Leave out what has none."
        )
    words = extra("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()

    def split(text: str) -> list[str]:
        return words(text.lower()).split()

    said, wanted = [split(text) for text in outputs], [[split(text) for text in texts] for texts in references]
    return {
        "bleu": _bleu(outputs, references),
        "rouge_l": _rouge_l(outputs, references),
        "meteor_no_synonyms": _meteor(said, wanted),
        "nist": _nist(said, wanted),
        "cider": _cider(said, wanted),
    }


def _bleu(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    streams = [list(stream) for stream in zip_longest(*references)]  # sacrebleu takes None where an output has fewer references
    return float(extra("sacrebleu").corpus_bleu(list(outputs), streams, lowercase=True).score)


def _rouge_l(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    scorer = extra("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    return 100 * fmean(scorer.score_multi(list(wanted), said)["rougeL"].fmeasure for said, wanted in zip(outputs, references, strict=True))


def _meteor(outputs: list[list[str]], references: list[list[list[str]]]) -> float:
    score = extra("nltk.translate.meteor_score").meteor_score
    return fmean(score(wanted, said, wordnet=_NoSynonyms()) for said, wanted in zip(outputs, references, strict=True))


def _nist(outputs: list[list[str]], references: list[list[list[str]]]) -> float:
    longest = max(len(words) for words in outputs)  # nltk divides by the number of n-grams of each order
    return float(extra("nltk.translate.nist_score").corpus_nist(references, outputs, n=min(NGRAMS, longest))) if longest else 0.0


def _cider(outputs: list[list[str]], references: list[list[list[str]]]) -> float:
    wanted = {i: [" ".join(words) for words in texts] for i, texts in enumerate(references)}
    score, _ = extra("pycocoevalcap.cider.cider").Cider().compute_score(wanted, {i: [" ".join(words)] for i, words in enumerate(outputs)})
    return float(score)
