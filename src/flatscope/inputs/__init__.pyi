"""Names for those who read data and weights as the commands do, each with the module that has it."""

from flatscope.inputs.data_set import Data as Data
from flatscope.inputs.data_set import Raw as Raw
from flatscope.inputs.loading import load as load
from flatscope.inputs.public_sets import available as available
from flatscope.inputs.weight_files import load_weights as load_weights
from flatscope.inputs.weight_files import save_weights as save_weights
from flatscope.loss import next_tokens as next_tokens
