"""Real silos: the same methods between machines, over Flower.

parcel       what travels: a typed header and one byte string
agreement    what all parties of a run agree on before anything is executed
silo_file    `silo.toml`: what a silo is, holds and allows
shelf        what a silo keeps of a run, so that nothing is done twice
silo         executes what is asked, if its file allows it
coordinator  the transport: tasks, values and evaluations as messages, sent again where they were lost
client_app   Flower's end at a silo              (imports flwr)
server_app   Flower's end at the coordinator     (imports flwr)
guard        starts the silo's end without code from elsewhere (imports flwr)
commands     the Flower commands that `ekiden silo` and `ekiden run --on flower` wrap
"""
