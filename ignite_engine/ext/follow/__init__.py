"""Evaluation beside a run: each checkpoint that it saves is evaluated by another process, while it trains on."""
