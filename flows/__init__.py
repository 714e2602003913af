"""Prefect pipeline: flows, tasks, artifacts, supervision of child processes and the `forebay` command."""
