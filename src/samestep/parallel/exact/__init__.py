"""What keeps a step exact however it is cut, and a proof exact to the last digits.

draws           how a forward's random numbers are made by sample number; read it first
generators      how a draw that nothing answers is found, and the line that makes it
batch_buffers   buffers that are a mean or a sum over the batch, joined over forwards and ranks
float64         the mode under which a step of precision fp64 runs
grouped_product the one operator of many models that PyTorch has in float32 and below only
"""
