"""What stands at the coordinator: the transport between machines, a run from roll call to model,
and its check.
"""
