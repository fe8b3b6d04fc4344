{{/* Combinations of values that the schema cannot check. All problems are printed at once. */}}
{{- define "grpo.checks" -}}
{{- $v := .Values }}
{{- $problems := list }}
{{- if and (not $v.image.registry) (ne $v.image.pullPolicy "Never") (include "grpo.usesDefaultImage" .) }}
{{- $problems = append $problems "image.registry is empty, so the nodes cannot pull the images: set image.registry to your registry (`make images REGISTRY=<registry> PUSH=1` pushes the images), or load the images onto every node and set image.pullPolicy=Never" }}
{{- end }}
{{- if and $v.model.name (not $v.run.lr) }}
{{- $problems = append $problems (printf "model.name is %s, but run.lr is not set: set run.lr, for example run.lr=1e-5 for a pretrained model" $v.model.name) }}
{{- end }}
{{- if and (hasPrefix "/" $v.model.name) (not (hasPrefix "/models/" $v.model.name)) }}
{{- $problems = append $problems (printf "model.name is %s: put the model into the volume of persistence.models, and set model.name to its directory below /models, or to an id on the Hugging Face hub" $v.model.name) }}
{{- end }}
{{- $step := mul $v.run.batchSize $v.run.gradientAccumulationSteps }}
{{- if mod $step $v.environment.groupSize }}
{{- $problems = append $problems (printf "run.batchSize %v × run.gradientAccumulationSteps %v = %v sequences per step, which environment.groupSize %v does not divide: change one of the three values" $v.run.batchSize $v.run.gradientAccumulationSteps $step $v.environment.groupSize) }}
{{- end }}
{{- if gt (int $v.run.seqLen) (int $v.vllmServer.maxModelLen) }}
{{- $problems = append $problems (printf "run.seqLen %v is larger than vllmServer.maxModelLen %v: raise vllmServer.maxModelLen or lower run.seqLen" $v.run.seqLen $v.vllmServer.maxModelLen) }}
{{- end }}
{{- if and $v.redis.enabled $v.redis.external.existingSecret }}
{{- $problems = append $problems (printf "redis.enabled is true and redis.external.existingSecret is %s, but a run uses one Redis: set redis.enabled=false to use the external Redis, or remove redis.external.existingSecret" $v.redis.external.existingSecret) }}
{{- end }}
{{- if and (not $v.redis.enabled) (not $v.redis.external.existingSecret) }}
{{- $problems = append $problems "redis.enabled is false, but redis.external.existingSecret is empty: set it to a Secret with the URL of your Redis, or set redis.enabled=true" }}
{{- end }}
{{- if and $v.environment.data $v.environment.dataClaim }}
{{- $problems = append $problems (printf "environment.data is %s and environment.dataClaim is %s, but a task has one data set: remove one of the two" $v.environment.data $v.environment.dataClaim) }}
{{- end }}
{{- $arguments := join " " $v.environment.extraArgs }}
{{- if and (regexMatch "\\.py(:[^A-Z].*)?$" $v.environment.task) (not $v.environment.data) (not $v.environment.dataClaim) (not (contains "--data" $arguments)) }}
{{- $problems = append $problems (printf "environment.task is %s, a reward function, which has no prompts of its own: set environment.data to a file of environment.tasksConfigMap or an id on the Hugging Face hub, or environment.dataClaim" $v.environment.task) }}
{{- end }}
{{- if eq $v.gpu.sharing "dra" }}
{{- if ne $v.device "gpu" }}
{{- $problems = append $problems "gpu.sharing is dra, but device is cpu: set device=gpu, or gpu.sharing=singleContainer" }}
{{- else if and (eq $v.mode "shared_vllm") (semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version) }}
{{- $problems = append $problems (printf "gpu.sharing is dra, which needs Kubernetes 1.34, but the cluster has %s: set gpu.sharing=singleContainer" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- end }}
{{- if eq $v.persistence.accessMode "ReadWriteOnce" }}
{{- range $name := list "vllmServer" "environment" }}
{{- $pod := index $v $name }}
{{- if and (or (ne $name "vllmServer") (eq (include "grpo.layout" $) "apart")) (ne (toJson $pod.nodeSelector) (toJson $v.trainer.nodeSelector)) }}
{{- $problems = append $problems (printf "persistence.accessMode is ReadWriteOnce, so one node runs all pods with volumes, but %s.nodeSelector and trainer.nodeSelector differ: make the two values equal, or set persistence.accessMode=ReadWriteMany" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- $server := $v.vllmServer }}
{{- if and (eq $v.mode "shared_vllm") (or $server.autoscaling.enabled (gt (int $server.replicas) 1)) }}
{{- $problems = append $problems (printf "vllmServer.replicas is %v and vllmServer.autoscaling.enabled is %v, but in mode shared_vllm the trainer shares the memory of one server: set mode=none, mode=lora_only or mode=lora_restart, or vllmServer.replicas=1 and vllmServer.autoscaling.enabled=false" $server.replicas $server.autoscaling.enabled) }}
{{- end }}
{{- if and (eq $v.mode "shared_vllm") (gt (int $server.gpus) 1) }}
{{- $problems = append $problems (printf "vllmServer.gpus is %v, but in mode shared_vllm the trainer writes whole weights into the memory of one worker: set mode=none, mode=lora_only or mode=lora_restart, or vllmServer.gpus=1" $server.gpus) }}
{{- end }}
{{- $trainer := $v.trainer }}
{{- if and (eq $v.mode "shared_vllm") (gt (mul $trainer.ranks $trainer.nodes) 1) }}
{{- $problems = append $problems (printf "trainer.ranks is %v and trainer.nodes is %v, but mode shared_vllm needs one trainer process, because it trains the server's own memory: set mode=none, mode=lora_only or mode=lora_restart, or trainer.ranks=1 and trainer.nodes=1" $trainer.ranks $trainer.nodes) }}
{{- end }}
{{- if and (gt (int $trainer.nodes) 1) (eq $v.persistence.accessMode "ReadWriteOnce") }}
{{- $problems = append $problems (printf "trainer.nodes is %v and persistence.accessMode is ReadWriteOnce, but pods on several nodes read the model and the checkpoints: set persistence.accessMode=ReadWriteMany, or trainer.nodes=1 and a larger trainer.ranks" $trainer.nodes) }}
{{- end }}
{{- range $name := list "runApi" "vllmServer" }}
{{- $pods := index $v $name }}
{{- if gt (int $pods.autoscaling.minReplicas) (int $pods.autoscaling.maxReplicas) }}
{{- $problems = append $problems (printf "%s.autoscaling.minReplicas %v is larger than maxReplicas %v: lower minReplicas or raise maxReplicas" $name $pods.autoscaling.minReplicas $pods.autoscaling.maxReplicas) }}
{{- end }}
{{- if and $pods.podDisruptionBudget.enabled (not $pods.autoscaling.enabled) (lt (int $pods.replicas) 2) }}
{{- $problems = append $problems (printf "%s.podDisruptionBudget.enabled is true, but %s.replicas is 1, so a drained node would stop the only pod all the same: set %s.replicas=2, or %s.podDisruptionBudget.enabled=false" $name $name $name $name) }}
{{- end }}
{{- end }}
{{- if and $v.metrics.podAnnotations $v.accessToken.existingSecret }}
{{- $problems = append $problems "metrics.podAnnotations is true, but with accessToken.existingSecret run-api's metrics need the access token, which annotations cannot name: use metrics.serviceMonitor.enabled=true instead" }}
{{- end }}
{{- if and $v.wandb.enabled (eq $v.wandb.mode "online") (not $v.wandb.existingSecret) }}
{{- $problems = append $problems "wandb.enabled is true, but wandb.existingSecret is empty: set it to a Secret with your W&B API key, or set wandb.mode=offline" }}
{{- end }}
{{- range $value, $who := dict "environment.keda.enabled" (list $v.environment.keda.enabled "KEDA") "metrics.serviceMonitor.enabled" (list $v.metrics.serviceMonitor.enabled "Prometheus") }}
{{- if and (first $who) $v.networkPolicy.enabled (not $v.networkPolicy.allowFrom) }}
{{- $problems = append $problems (printf "%s is true, but no NetworkPolicy allows %s to connect: add its namespace to networkPolicy.allowFrom, or set networkPolicy.enabled=false" $value (last $who)) }}
{{- end }}
{{- end }}
{{- if and (include "grpo.lora" .) (gt (int $v.run.lora.r) 512) }}
{{- $problems = append $problems (printf "run.lora.r is %v, but vLLM accepts at most 512: lower run.lora.r" $v.run.lora.r) }}
{{- end }}
{{- range $value, $secret := include "grpo.secrets" . | fromYaml }}
{{- if and $secret (lookup "v1" "ServiceAccount" $.Release.Namespace "default") (not (lookup "v1" "Secret" $.Release.Namespace $secret)) }}
{{- $problems = append $problems (printf "%s is %s, but the namespace %s has no such Secret: create it (kubectl create secret generic %s …), or correct the name" $value $secret $.Release.Namespace $secret) }}
{{- end }}
{{- end }}
{{- with $problems }}
{{- fail (printf "\n- %s" (join "\n- " .)) }}
{{- end }}
{{- end }}

{{/* Secrets that the user has to create, by the value that names them. */}}
{{- define "grpo.secrets" -}}
accessToken.existingSecret: {{ .Values.accessToken.existingSecret | quote }}
model.hubToken.existingSecret: {{ .Values.model.hubToken.existingSecret | quote }}
redis.external.existingSecret: {{ .Values.redis.external.existingSecret | quote }}
wandb.existingSecret: {{ .Values.wandb.existingSecret | quote }}
{{- end }}

{{- define "grpo.usesDefaultImage" -}}
{{- $v := .Values }}
{{- if or (not $v.runApi.image) (not $v.vllmServer.image) (not $v.trainer.image) (not $v.model.image) (not $v.environment.image) (and $v.redis.enabled (not $v.redis.image)) }}true{{ end -}}
{{- end }}
