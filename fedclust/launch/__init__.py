"""From a configuration to a Trainer that is ready to run; under the command and under studies.

Attributes:
    PURPOSES: What each command that runs a Trainer is for.
"""

PURPOSES = {
    "fit": "train, then test the best round; a run directory keeps everything",
    "validate": "evaluate a checkpoint on the clients' validation rows",
    "test": "evaluate a checkpoint on the test split",
    "predict": "write the cluster of every row to predictions.csv",
}
