"""Studies: hyperparameter search by Optuna over runs, resumed exactly."""
