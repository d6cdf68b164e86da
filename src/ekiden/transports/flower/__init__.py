"""Run the same methods between real silos, over Flower.

parcel       what travels: a typed header and one byte string
sealing      encrypts values for the parties that use them
custody      what silos sign about what they did and measured; verify checks a run folder against it
reported     compares what a run folder reports with what silos signed
agreement    what all parties of a run agree on before anything is executed
federation   the folder of a federation, with certificates and keys
certificates a certificate authority for one SuperLink
silo_file    `silo.toml`: what a silo is, holds and allows
shelf        what a silo keeps of a run, so that nothing is done twice
contents     what a request holds, opened and checked
arguments    what a task gets: from the request, from the silo's own values, and the initial model
policy       what a silo agrees to
admission    binds a run to its terms at a silo, and counts its requests
measured     what a silo reports about models on its test samples, and how often
request_log  the silo's own record of what it was asked
silo         executes what is asked, if its file allows it
courier      sends messages, repeats lost ones, and waits for answers
roll         which node is which silo
coordinator  the transport: tasks, values and evaluations as messages
measure      models measured on the silos' test samples
session      a run, from the roll call to the model
client_app   Flower's end at a silo              (imports flwr)
server_app   Flower's end at the coordinator     (imports flwr)
guard        starts the silo's end, never code from others (imports flwr)
link         the SuperLink with a port for silos and one for the coordinator (imports flwr)
commands     the Flower commands that talk to a SuperLink, as `ekiden run --on flower` wraps them
superlink    the command that runs a federation's SuperLink      supernode    the one that connects a silo
"""
