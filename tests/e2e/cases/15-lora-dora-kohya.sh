#!/bin/bash
# kohya/LyCORIS DoRA files (dora_scale; diffusers filters them out with a warning): --lora-from must not start from half an adapter
. "$(dirname "$0")/lib.sh"
MODEL=$W/model
python "$HERE/make_model.py" "$MODEL" >/dev/null 2>&1 || fail "could not write"
python - $W $MODEL <<'PY' 2>&1 | grep -v -i -e torchao -e transformers] -e pytree; [ ${PIPESTATUS[0]} = 0 ] || fail "a DoRA file of kohya's form, also one that this trainer wrote, is loaded as plain LoRA: its magnitudes are dropped"
import sys, torch
from safetensors.torch import save_file
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict
from bucketline.train.lora_file import start_from, for_other_tools
def fresh(dora):
    m=UNet2DConditionModel.from_pretrained(sys.argv[2],subfolder="unet").requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=4,lora_alpha=4,target_modules=["to_q","to_k","to_v","to_out.0"],use_dora=dora),m); return m
src=fresh(True); torch.manual_seed(0)
for n,p in src.named_parameters():
    if "lora_" in n: p.data=p.data+0.3*torch.randn_like(p)
named={("unet."+k):v.contiguous() for k,v in get_peft_model_state_dict(src).items()}
k=for_other_tools(named,"unet",4.0,is_kohyas=True)      # as the run folder's kohya_lora.safetensors is written
print(sorted({x.rpartition(".")[2] for x in k}), len(k),"tensors")
save_file({a:b.contiguous() for a,b in k.items()},sys.argv[1]+"/kohya_lora.safetensors")
m=fresh(False)
try: start_from(__import__("pathlib").Path(sys.argv[1]+"/kohya_lora.safetensors"),m,"StableDiffusionPipeline")
except Exception as e: print("refused:",e); sys.exit(0)
x=torch.randn(1,4,16,16); t=torch.tensor([500]); c=torch.randn(1,5,32)
with torch.no_grad(): a,b=src(x,t,c).sample,m(x,t,c).sample
print("loaded without an error; the model's output differs by", float((a-b).norm()/a.norm())); sys.exit(1)
PY
ok "refused, or the same model"
