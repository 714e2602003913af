"""From a prompt to a scored group of token-exact rollouts."""
