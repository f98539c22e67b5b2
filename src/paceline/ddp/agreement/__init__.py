"""What ranks tell each other in every synchronized backward besides gradients, and what follows from it."""
