"""The forward pass of a layer as one persistent kernel.

Every CTA has four roles: *math* warps (the two warpgroups that the launch has), one *load* warp, and a few
*dispatch* and *store* warps. CTAs take tasks by ticket, in the order of :mod:`moeloom.kernels.forward.order`; nothing
else says which CTA does what, and every wait points to an earlier task or piece, so one resident CTA is enough.

| role | what it does | what it waits for in other CTAs |
| --- | --- | --- |
| dispatch | pulls token rows into the ring, a piece at a time | gate/up tiles that still read the ring's slot |
| load | takes tasks, hands them to math and store, loads operands | rows pulled; hidden rows written; all rows pushed |
| math | tiles of 128 x 256; SwiGLU; the ordered weighted sum | nothing |
| store | writes hidden rows and saved pre-activations, pushes rows | down tiles that still read the ring's slot |

Counters only grow. Of each row block: ``x_ready`` counts pieces pulled; ``h_ready`` gate/up tiles whose hidden columns
are written, which also says that they have read their token rows; ``d_done`` down tiles that have read the hidden rows
and pushed their columns. ``pushed`` counts the down tiles of all row blocks.
"""
