"""Other libraries' training loops, with this library's gate, methods, ledger and receipt inside.  Nothing of the library imports them.

    opacus         make_private: the loop that Opacus's PrivacyEngine made private, with three lines changed
    transformers   PrivateTrainer: the Trainer of transformers, whose steps are those of `plan.private`
    accelerate     private: a model that an Accelerator prepared, and no wrapper around it

Each ends with the epsilon, the receipt and the numbers of the plain path, `plan.private(…)`.  Each module needs its library.
"""
