"""`freerun federate`: several sites train on their own environments and share only weights, by way of Flower.

`shared_state`   what a site shares: weights, and the moments of its normalisers
`moment_merging` how the moments of several sites become one
`site_training`  a site: a training that pauses after every round, and goes on with the weights of all
`site_link`      how a site is reached, from a process of Flower on the same machine
`site_processes` the sites of a local federation, each in a process of its own
`federation`     a local federation: sites and Flower's simulation engine
`client_app`, `server_app`, `site_strategy`: the only modules that import Flower
"""
