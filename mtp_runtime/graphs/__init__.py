"""Static graphs: how many slots to capture, which graph a step runs in, how its free slots are filled. Plain Python."""
