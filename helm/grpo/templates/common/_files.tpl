{{/* A pod that mounts the checkpoints, which NOTES.txt prints. */}}
{{- define "grpo.filesPod" -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "grpo.name" . }}-files
  labels:
    {{- include "grpo.labels" (list . "files") | nindent 4 }}
    grpo/volumes: "true"
spec:
  restartPolicy: Never
  {{- include "grpo.podDefaults" (list . .Values.trainer "volumes") | nindent 2 }}
  containers:
    - name: files
      image: {{ include "grpo.image" (list . "run-api" .Values.runApi.image) }}
      {{- include "grpo.containerDefaults" . | nindent 6 }}
      command: [sleep, "86400"]
      volumeMounts:
        - {name: checkpoints, mountPath: /checkpoints, readOnly: true}
  volumes:
    - name: checkpoints
      persistentVolumeClaim: {claimName: {{ include "grpo.checkpointsClaim" . }}}
{{- end }}
