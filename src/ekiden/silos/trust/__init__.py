"""What all parties rely on: keys, seals, messages, masks, the terms of a run, and the chain of
custody.
"""
