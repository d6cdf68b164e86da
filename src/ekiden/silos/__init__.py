"""Run the same methods between real silos, over Flower.

trust/       what all parties rely on: parcel (a message: a typed header and one byte string; what a request holds,
             opened and checked), keys (and all signatures), sealing, masking, agreement (the
             roster, and the terms of a run), custody (what silos sign about what they did and
             measured), report (what silos report about models)
silo/        what stands at a silo: silo_file (`silo.toml`: what it is, holds, allows; its folder, and the others'
             keys), policy (what it agrees to), approval (of plans, by who runs it), participation
             (in a run: terms, limits, log), silo (answers requests), tasks (does tasks), measuring
             (measures models), shelf (what it keeps, so that nothing is done twice)
coordinator/ what stands at the coordinator: federation (its folder, with certificates and keys),
remote_plan (what is
             run), session (a run, from the roll call to the model; later measurements of it),
             transport (tasks, values and evaluations as messages), courier (sends messages, repeats
             lost ones), verify (checks a run folder)
client_app   Flower's end at a silo, and its process, which never runs code from others (imports flwr)
server_app   Flower's end at the coordinator     (imports flwr)
envelope     a byte string in a Flower message   (imports flwr)
superlink    the SuperLink with a port for silos and one for the coordinator (imports flwr)
ports        what our HTTP ports share           metrics      health and counts for a monitor
commands     the Flower commands that run a SuperLink or talk to one      supernode    the one that connects a silo
"""
