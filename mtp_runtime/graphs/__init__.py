"""Static graphs: how many slots to capture, which graph a step runs in, how its free slots are filled.

slots, planner and strategy are plain Python: the configuration and mtpctl use them where there is no torch.
"""
