"""Where metrics go: the store always, and what the recipe names beside it."""
