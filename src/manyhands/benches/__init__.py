"""Tables and figures that anyone can reproduce: what manyhands does, beside what others do."""
