"""The names that other libraries have for the settings of a run, so that a typo's answer can name ours."""

from __future__ import annotations

SYNONYMS = {
    "learning_rate": ("lr", "step_size"),
    "anneal_learning_rate": ("anneal_lr", "lr_decay", "linear_lr_decay"),
    "num_workers": ("n_envs", "num_env", "nenvs", "n_workers", "workers", "num_processes", "num_actors", "n_jobs"),
    "total_steps": ("timesteps", "total_timesteps", "num_timesteps", "n_timesteps", "num_env_steps", "max_steps"),
    "total_episodes": ("num_episodes", "n_episodes", "max_episodes"),
    "steps_per_update": ("n_steps", "num_steps", "rollout_steps", "train_batch_size", "train_freq"),
    "minibatch_size": ("batch_size", "mini_batch_size", "sgd_minibatch_size"),
    "num_epochs": ("n_epochs", "epochs", "update_epochs", "ppo_epoch", "num_sgd_iter", "num_learning_epochs"),
    "entropy_coef": ("ent_coef", "entropy_coeff", "ent_weight"),
    "value_coef": ("vf_coef", "value_loss_coef", "vf_loss_coeff"),
    "clip_range": ("clip", "clip_coef", "clip_param", "cliprange", "clip_ratio"),
    "gae_lambda": ("lam", "lambda", "lambda_", "gae_lam"),
    "gamma": ("discount", "discount_factor"),
    "target_kl": ("kl_target", "max_kl"),
    "max_grad_norm": ("grad_clip", "max_gradient_norm", "clip_grad_norm"),
    "normalize_obs": ("norm_obs", "normalize_observations", "obs_norm"),
    "normalize_reward": ("norm_reward", "reward_norm"),
    "normalize_advantage": ("norm_adv", "normalize_advantages"),
    "hidden_sizes": ("net_arch", "hiddens", "hidden_layers", "hidden_dims"),
    "initial_log_std": ("log_std_init",),
    "buffer_size": ("replay_size", "replay_buffer_size"),
    "learning_starts": ("start_steps", "warmup_steps", "learning_start"),
    "updates_per_step": ("gradient_steps", "utd", "utd_ratio"),
    "target_rate": ("tau", "polyak"),
    "target_interval": ("target_update_interval", "target_network_frequency", "target_update_freq"),
    "epsilon_start": ("exploration_initial_eps", "start_e", "eps_start"),
    "epsilon_end": ("exploration_final_eps", "end_e", "eps_end"),
    "epsilon_steps": ("exploration_steps", "epsilon_decay", "eps_decay"),
    "num_return_steps": ("nstep", "multi_step"),
    "duelling": ("dueling",),
    "env_args": ("env_kwargs", "env_config"),
    "max_episode_steps": ("horizon", "max_ep_len", "max_episode_length", "time_limit"),
    "device": ("cuda", "gpu"),
    "run_dir": ("log_dir", "logdir", "output_dir", "save_dir"),
    "checkpoint_every": ("save_freq", "save_interval", "checkpoint_freq"),
    "eval_every": ("eval_freq", "eval_interval", "evaluation_interval"),
    "eval_episodes": ("n_eval_episodes",),
    "algo": ("algorithm", "alg"),
}
"""Other names of a setting, by its name in freerun. A name that is itself a setting of the run is never looked up."""


def name_here(name: str) -> str | None:
    """Return the freerun name of a setting of another library; None if it is not known."""
    return next((here for here, others in SYNONYMS.items() if name.lower() in others), None)
