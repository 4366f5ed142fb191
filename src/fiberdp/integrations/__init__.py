"""FiberDP below the training loops that people already have.  Each module needs its library, and nothing else here imports one.

transformers   PrivateTrainer: the Trainer of transformers, whose steps are those of `plan.private`
accelerate     private: a model that an Accelerator prepared, and no wrapper around it
"""
