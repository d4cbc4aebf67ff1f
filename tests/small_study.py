"""Arguments and a space that make a real study as small as can be."""

ALGORITHM, CLIENT = "model.init_args.algorithm.init_args.", "model.init_args.client.init_args."
SMALL = [
    "--trainer.max_epochs=2", "--data.init_args.partition.init_args.n_clients=2",
    *(f"--{ALGORITHM}{name}=1" for name in ("pretrain_epochs", "cluster_epochs", "round_epochs")),
    f"--{ALGORITHM}n_synthetic=60", f"--{CLIENT}hidden_dims=[8]", f"--{CLIENT}n_clusters=3",
    f"--{CLIENT}batch_size=256",
]  # fmt: skip
SPACE = {
    "parameters": {
        f"{CLIENT}latent_dim": {"kind": "categorical", "choices": [2, 3]},
        f"{CLIENT}lr": {"kind": "log_float", "low": 1e-3, "high": 1e-1},
        f"{CLIENT}hidden_dims": {"kind": "layers", "choices": ["8", "8-4"]},
    }
}
