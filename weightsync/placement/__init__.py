"""Where trainer and engines are, and which scheme suits that.

``place`` is what is seen of one process, ``questions`` how it is asked, ``ends`` who is asked,
``proofs`` what they do to prove something to each other, and ``choose`` the rules.
"""
