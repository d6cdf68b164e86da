"""Run the same methods between real silos, over Flower.

trust/       what all parties rely on: parcel (a message: a typed header and one byte string), contents (what a request
             holds, opened and checked), keys, sealing, masking, agreement (the terms of a run), custody (what silos
             sign about what they did and measured), report (what silos report about models on their tests)
silo/        what stands at a silo: silo_file (`silo.toml`: what it is, holds and allows), scaling (agreed for columns),
             policy (what it agrees to), participation (in a run: terms, limits, log), silo (executes what is asked),
             tasks, measuring, shelf (what it keeps, so that nothing is done twice)
coordinator/ what stands at the coordinator: federation (its folder, with certificates and keys), remote_plan (what is
             run), session (a run, from the roll call to the model), transport (tasks, values and evaluations as
             messages), courier (sends messages, repeats lost ones), measuring, evaluating (a finished model),
             verify (checks a run folder)
client_app   Flower's end at a silo              (imports flwr)
server_app   Flower's end at the coordinator     (imports flwr)
envelope     a byte string in a Flower message   (imports flwr)
guard        starts the silo's end, never code from others (imports flwr)
link         the SuperLink with a port for silos and one for the coordinator (imports flwr)
commands     the Flower commands that talk to a SuperLink, as `ekiden run --on flower` wraps them
superlink    the command that runs a federation's SuperLink      supernode    the one that connects a silo
"""
